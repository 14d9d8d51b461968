"""The command ``kvpack``: options, output and exit status over the library."""
