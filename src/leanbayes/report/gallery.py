"""Images of examples as plain data, which the report shows."""

import base64
import binascii
from dataclasses import dataclass

_PNG_START = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Png:
    """A PNG file.

    Attributes:
        data: The file in base64.
        label: What it shows, such as "truth", if several files stand side by side.

    Raises:
        ValueError: If data is not a PNG file in base64.

    Example:
        >>> Png(base64.b64encode(Path("digit.png").read_bytes()).decode())
        Png(28×28)
    """

    data: str
    label: str = ""

    def __post_init__(self) -> None:
        try:
            start = base64.b64decode(self.data, validate=True)[:24]
        except (binascii.Error, ValueError):
            start = b""
        if len(start) < 24 or not start.startswith(_PNG_START):
            raise ValueError("An image must be a PNG file in base64.")

    def __repr__(self) -> str:
        width, height = self.size
        return f"Png({width}×{height}{', ' + repr(self.label) if self.label else ''})"

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        header = base64.b64decode(self.data[:32])
        return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])


@dataclass(frozen=True)
class GalleryImage:
    """One example in a gallery: an image, or several side by side.

    Attributes:
        pngs: The images.
        caption: Text below them.
        alt: Description for readers who do not see them.

    Example:
        >>> GalleryImage((png,), "predicted 3 (99.1%), truth 5", "A digit 5, predicted as 3.")
    """

    pngs: tuple[Png, ...]
    caption: str
    alt: str


@dataclass(frozen=True)
class Gallery:
    """Images of one method, or of several together. Galleries with the same title are shown together.

    Attributes:
        title: Heading.
        caption: How to read the images.
        method: Name of the method, or "" for several.
        images: The images.

    Example:
        >>> Gallery("Most confident mistakes", "", "mean-field", (image,))
        Gallery('Most confident mistakes', 'mean-field', 1 image)
    """

    title: str
    caption: str
    method: str
    images: tuple[GalleryImage, ...]

    def __repr__(self) -> str:
        count = f"{len(self.images)} image{'s' * (len(self.images) != 1)}"
        return f"Gallery({self.title!r}, {self.method!r}, {count})"
