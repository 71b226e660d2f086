"""The messages of the Container Storage Interface, generated from csi.proto by setup.py.

It has the parts of the CSI specification, version 1, that the plugin uses.
"""
