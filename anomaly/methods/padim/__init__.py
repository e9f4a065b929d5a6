"""PaDiM (Defard et al. 2020): one Gaussian for each patch position."""
