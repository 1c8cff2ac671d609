"""Engines and the parts that shape generation."""
