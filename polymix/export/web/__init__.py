"""Models as a web page: ONNX files, onnxruntime-web beside them, and a page that runs them in the visitor's browser."""
