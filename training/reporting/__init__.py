"""Progress, results with uncertainties, loss plots."""
