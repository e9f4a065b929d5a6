"""Writing results so that nothing is lost: whole files, tables, one run at a time in a folder."""
