package main

const gnuTriplet = "aarch64-linux-gnu"
