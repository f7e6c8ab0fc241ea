"""Comparisons of methods on one model: arms that differ in one thing, and the same tokens scored by each."""
