"""Measure the loaders that users have for weights and data sets, each as its manual calls it."""
