"""The CSI node plugin: it bind-mounts the mounts of this node into pods. See docs/CSI.md."""
