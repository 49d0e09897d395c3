"""What the two kinds of object storage do: list the objects of a folder, and read one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from pegboard.errors import ModelError

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredObject:
    """key: the whole name in the bucket. size: in bytes. version: changes with the content."""

    key: str
    size: int
    version: str


class Store(Protocol):
    def objects(self, bucket: str, prefix: str) -> Iterator[StoredObject]:
        """Yield the objects whose names begin with `prefix`. Raises ModelError."""

    def chunks(self, bucket: str, key: str) -> Iterator[bytes]:
        """Yield the content of an object. Raises ModelError."""


class S3Store:
    def __init__(self) -> None:
        import boto3

        with self._blamed():
            self.client = boto3.client("s3")

    def objects(self, bucket: str, prefix: str) -> Iterator[StoredObject]:
        with self._blamed():
            pages = self.client.get_paginator("list_objects_v2").paginate(
                Bucket=bucket, Prefix=prefix
            )
            for page in pages:
                for one in page.get("Contents", ()):
                    yield StoredObject(one["Key"], one["Size"], one["ETag"])

    def chunks(self, bucket: str, key: str) -> Iterator[bytes]:
        with self._blamed():
            body = self.client.get_object(Bucket=bucket, Key=key)["Body"]
            yield from body.iter_chunks(CHUNK_BYTES)

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (BotoCoreError, ClientError) as error:
            raise ModelError(
                f"S3 answered with an error: {error}; check the name of the bucket, the "
                "credentials (AWS_ACCESS_KEY_ID, …) and the network"
            ) from error


class GoogleStore:
    def __init__(self) -> None:
        from google.cloud import storage

        with self._blamed():
            self.client = storage.Client()

    def objects(self, bucket: str, prefix: str) -> Iterator[StoredObject]:
        with self._blamed():
            for blob in self.client.list_blobs(bucket, prefix=prefix):
                yield StoredObject(blob.name, blob.size, str(blob.generation or blob.etag))

    def chunks(self, bucket: str, key: str) -> Iterator[bytes]:
        with self._blamed(), self.client.bucket(bucket).blob(key).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        from google.api_core.exceptions import GoogleAPIError
        from google.auth.exceptions import GoogleAuthError

        try:
            yield
        except (GoogleAPIError, GoogleAuthError, OSError) as error:
            raise ModelError(
                f"Google Cloud Storage answered with an error: {error}; check the name of the "
                "bucket, the credentials (GOOGLE_APPLICATION_CREDENTIALS) and the network"
            ) from error
