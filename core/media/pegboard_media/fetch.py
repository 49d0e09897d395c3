"""From the URL of an item to the bytes of its file."""

from __future__ import annotations

from pegboard.interfaces.multimodal_processor import MediaReaderSetup
from pegboard_media.data_url import read_data_url
from pegboard_media.limits import Unusable
from pegboard_media.local_file import read_local
from pegboard_media.web import Connect, Resolve, Web, connect_to, resolve_name


class Fetcher:
    """resolve, connect: how names are looked up, and how addresses are reached."""

    def __init__(
        self,
        setup: MediaReaderSetup,
        resolve: Resolve = resolve_name,
        connect: Connect = connect_to,
    ) -> None:
        self._local_path = setup.local_path
        self._web = Web(setup.domains, resolve, connect)

    def fetch(self, url: str) -> bytes:
        """Return the bytes of the file at a data:, http:, https: or file: URL. Raises Unusable."""
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return read_data_url(url)
        if scheme == "file":
            return read_local(url, self._local_path)
        if scheme in ("http", "https"):
            return self._web.fetch(url)
        raise Unusable("is not a URL that can be read; expected data:, http:, https: or file:")
