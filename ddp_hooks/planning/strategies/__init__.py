"""Ways to communicate, as the simulator runs them."""
