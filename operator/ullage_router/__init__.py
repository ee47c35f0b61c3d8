"""Router of Ullage: predicts each request's bytes and decides where it may run."""
