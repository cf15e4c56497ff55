//! The limiter's stub for /etc/ld.so.preload.
