"""What runs on a CPU: loops (`decode`, `choose`, `arithmetic`) that `build` compiles and `library` keeps."""
