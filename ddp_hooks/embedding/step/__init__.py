"""When a training step looks rows up, sends their gradients and applies them."""
