"""HDFS, on hdfs-native."""
