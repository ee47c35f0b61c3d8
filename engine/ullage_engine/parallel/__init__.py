"""One model on several devices: tensor ranks share a layer, pipeline stages share out layers."""
