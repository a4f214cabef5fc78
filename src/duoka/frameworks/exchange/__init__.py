"""What the frameworks share of an exchange between replicas: arrays in, arrays out, no framework imported."""
