"""Gradient compression: tensors to payloads and back, each method in a file of its own.

What exchanges the payloads is in orchestra.exchange.
"""
