"""Small convolutional networks."""

from torch import nn

from leanbayes.core.arguments import checked
from leanbayes.errors import LeanBayesError
from leanbayes.networks.checks import check_counts, check_image


@checked()
def lenet5(num_classes: int = 10, input_shape: tuple[int, ...] = (1, 28, 28)) -> nn.Sequential:
    """Build LeNet-5 with the layer sizes of Caffe and ReLU activations.

    It has 431,080 parameters for gray images of 28×28 pixels and 10 classes. See LeCun et al., "Gradient-based
    learning applied to document recognition", 1998.

    Args:
        num_classes: number of classes.
        input_shape: (channels, height, width) of an image, at least 16×16 pixels.

    Returns:
        Network that maps (batch, *input_shape) to logits (batch, num_classes).

    Raises:
        LeanBayesError: The images are too small, or an argument is invalid.

    Example:
        >>> from leanbayes.networks import lenet5
        >>> sum(parameter.numel() for parameter in lenet5().parameters())
        431080
    """
    channels, height, width = check_image(input_shape)
    check_counts(num_classes=num_classes)
    if min(height, width) < 16:
        raise LeanBayesError(f"LeNet-5 needs images of at least 16×16 pixels, not {height}×{width}: use small-cnn.")
    high, wide = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    return nn.Sequential(
        nn.Conv2d(channels, 20, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(50 * high * wide, 500),
        nn.ReLU(),
        nn.Linear(500, num_classes),
    )


@checked()
def small_cnn(num_classes: int = 10, input_shape: tuple[int, ...] = (1, 8, 8)) -> nn.Sequential:
    """Build a network of three 3×3 convolutions with batch normalization, for images as small as 8×8 pixels.

    The second and third convolution have stride 2. A linear layer follows.

    Args:
        num_classes: number of classes.
        input_shape: (channels, height, width) of an image.

    Returns:
        Network that maps (batch, *input_shape) to logits (batch, num_classes).

    Raises:
        LeanBayesError: An argument is invalid.

    Example:
        >>> from leanbayes.networks import small_cnn
        >>> sum(parameter.numel() for parameter in small_cnn().parameters())
        58634
    """
    channels, height, width = check_image(input_shape)
    check_counts(num_classes=num_classes)
    layers: list[nn.Module] = []
    for channels_in, channels_out, stride in ((channels, 32, 1), (32, 64, 2), (64, 64, 2)):
        conv = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1)
        layers += [conv, nn.BatchNorm2d(channels_out), nn.ReLU()]
    pixels = ((height + 3) // 4) * ((width + 3) // 4)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * pixels, num_classes))
