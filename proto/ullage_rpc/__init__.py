"""The wire kit that router and engine share: channels, errors, health, logs, metrics."""
