"""`covariance`: mean and full covariance in one pass (VDP, Dera et al. 2019), the baseline for `moments`.

A vector (B, n) has a covariance (B, n, n). A feature map (B, C, H, W) has a covariance of the pixels of each channel,
(B, C, HW, HW), and its channels are treated as independent. Memory grows with the fourth power of the side of an image,
so this rule is for networks of the size of LeNet.
"""

from leanbayes.rules.covariance import between_layers  # noqa: F401 (registers its formulas)
from leanbayes.rules.covariance.covariance import Covariance
from leanbayes.rules.covariance.covariances import Covariances, covariance_shape
from leanbayes.rules.covariance.weighted_layers import CovarianceWeight

__all__ = ["Covariance", "CovarianceWeight", "Covariances", "covariance_shape"]
