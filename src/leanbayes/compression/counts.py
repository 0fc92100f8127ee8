"""How the paper counts the parameters of a shared network."""


def paper_parameters(outliers: int, ellipses: int, gaussians: int) -> int:
    """Outliers + ellipses + 2·Gaussians, as in Tables 1 to 3: it leaves out σ of outliers, covariances and labels."""
    return outliers + ellipses + 2 * gaussians
