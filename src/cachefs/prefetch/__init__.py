"""What is fetched before anybody asks for it: files that a reader will probably read next."""
