"""Thresholds from good images alone, with their false-reject rates and confidence bounds.

Statistics of scores; nothing here knows a model or sees a test split.
"""
