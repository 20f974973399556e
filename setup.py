"""What `pyproject.toml` can not say: the package has one extension, and does without where there is no C compiler."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "dataplane.batch._memory",
            ["dataplane/batch/_memory.c"],
            extra_compile_args=["-O3"],
            optional=True,
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
