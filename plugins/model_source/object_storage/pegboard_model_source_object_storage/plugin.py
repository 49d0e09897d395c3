"""Specs of this package."""

from __future__ import annotations

from pegboard.interfaces.model_source import ModelSourceSpec

S3 = ModelSourceSpec(
    api="1.0",
    implementation="pegboard_model_source_object_storage.bucket_source:S3Source",
    probe="pegboard_model_source_object_storage.probe:probe_s3",
)

GS = ModelSourceSpec(
    api="1.0",
    implementation="pegboard_model_source_object_storage.bucket_source:GoogleSource",
    probe="pegboard_model_source_object_storage.probe:probe_gs",
)
