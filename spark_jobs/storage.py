"""Small files on any storage Spark can reach, through Hadoop's file systems.

Tables are read and written by Spark itself. This is for the manifest and for pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"


def _open(spark: SparkSession, path: str) -> tuple[Any, Any]:
    """The file system of a path, and the path as it knows it."""
    jvm: Any = spark._jvm
    there = jvm.org.apache.hadoop.fs.Path(path)
    java: Any = spark._jsc
    return there.getFileSystem(java.hadoopConfiguration()), there


def exists(spark: SparkSession, path: str) -> bool:
    files, there = _open(spark, path)
    return bool(files.exists(there))


def matches(spark: SparkSession, pattern: str) -> list[str]:
    """The paths a pattern fits, sorted."""
    files, there = _open(spark, pattern)
    found = files.globStatus(there) or []
    return sorted(str(item.getPath()) for item in found)


def read_text(spark: SparkSession, path: str) -> str:
    files, there = _open(spark, path)
    stream = files.open(there)
    try:
        jvm: Any = spark._jvm
        return bytes(jvm.org.apache.commons.io.IOUtils.toByteArray(stream)).decode()
    finally:
        stream.close()


def write_text(spark: SparkSession, path: str, text: str) -> None:
    """Replaces a file as a whole: it is written beside it and renamed."""
    files, there = _open(spark, path)
    jvm: Any = spark._jvm
    hidden = jvm.org.apache.hadoop.fs.Path(there.getParent(), f".{there.getName()}.tmp")
    stream = files.create(hidden, True)
    try:
        stream.write(bytearray(text.encode()))
    finally:
        stream.close()
    if not files.rename(hidden, there):  # HDFS does not rename onto a file
        files.delete(there, False)
        files.rename(hidden, there)


def delete(spark: SparkSession, path: str) -> None:
    files, there = _open(spark, path)
    files.delete(there, True)
