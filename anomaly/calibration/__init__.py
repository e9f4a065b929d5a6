"""Thresholds from good images alone: how many good parts they will reject, and how sure that is.

Pure statistics of scores; nothing here knows a model or sees a test split.
"""
