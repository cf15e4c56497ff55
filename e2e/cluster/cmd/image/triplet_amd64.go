package main

const gnuTriplet = "x86_64-linux-gnu"
