"""The compiler's passes: one file a pass, one public function named as its file."""

if __name__ != "ndcompile.passes":
    raise ImportError("import ndcompile.passes, not passes")
