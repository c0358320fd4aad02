"""Plug-ins for training frameworks."""
