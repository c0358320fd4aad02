"""Gradient compression: tensors to payloads and back.

What exchanges the payloads is in orchestra.exchange.
"""
