"""Hardware: records of devices and links, `rung bench` and `rung doctor`."""
