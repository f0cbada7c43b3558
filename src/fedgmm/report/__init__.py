"""The HTML report of a run, and pictures of the demo, the studies and the image data sets."""
