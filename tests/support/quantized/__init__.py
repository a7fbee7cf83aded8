"""Models and twins of the all-reduce in fewer bits."""
