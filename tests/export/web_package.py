"""A folder with the names of npm's package onnxruntime-web, which nothing runs."""

from polymix.export.web import runtime


def package_in(folder):
    package = folder / "node_modules/onnxruntime-web"
    (package / "dist").mkdir(parents=True)
    for name in runtime.FILES.values():
        (package / name).write_text('{"version": "1.99.0"}')
    return package
