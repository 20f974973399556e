"""The C extensions of the package, which `pyproject.toml` cannot declare. Their installation needs a C compiler."""

from setuptools import Extension, setup

_EXTENSIONS = (
    ("batch", "_memory"),
    ("batch", "_lists"),
    ("diagnosis", "_calls"),
    ("history", "_suffix"),
    ("observe", "_writer"),
    ("pipeline", "_events"),
    ("weights", "_sparse"),
)

setup(
    ext_modules=[
        Extension(
            f"dataplane.{package}.{name}",
            [f"dataplane/{package}/{name}.c"],
            extra_compile_args=["-O3"],
            py_limited_api=True,
        )
        for package, name in _EXTENSIONS
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
