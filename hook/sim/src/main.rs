//! Prints the figures.
use aliquot_limiter_sim::figures::{errors, tenants};
use aliquot_limiter_sim::world::{Load, VARIANTS};

fn main() {
    for variant in VARIANTS {
        for kernel in [5_000, 50_000, 500_000, 5_000_000, 50_000_000, 500_000_000, 2_000_000_000] {
            for percents in [&[10][..], &[30], &[50], &[70], &[90], &[30, 70], &[30, 50], &[10, 30, 50]] {
                let got = errors(variant, &tenants(percents, Load::of(kernel)), 1);
                println!("{} {kernel} {percents:?}: {got:.2?}", variant.name);
            }
        }
    }
}
