"""Trained settings compared: which of them catch the defects that are known, and at what cost."""
