"""Measurements for predictions: links, processors, and steps of models and scripts."""
