"""What `pyproject.toml` can not say: the package has two extensions, and does without where there is no C compiler."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            f"dataplane.batch.{name}",
            [f"dataplane/batch/{name}.c"],
            extra_compile_args=["-O3"],
            optional=True,
            py_limited_api=True,
        )
        for name in ("_memory", "_lists")
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
