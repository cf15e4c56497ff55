//! The part of the wall time of its kernels for which a process really had the GPU.
//!
//! Without MPS a GPU gives the processes that have work equal slices in turn, so while `n` processes have
//! work, each gets one of `n` parts. How much GPU time each process was recently charged tells how long each
//! had work, and that tells the part it had of its own kernels' wall time. Processes are taken to be
//! independent of each other.

/// The most processes that are told apart; others are left out.
pub(crate) const MOST: usize = 16;

/// The number of rounds of the iteration; each round at least halves the error where the GPU is not full.
const ROUNDS: usize = 24;

/// Returns each process's part of its kernels' wall time, from each one's GPU time as a part of the last
/// second.
pub(crate) fn own_parts(rates: &[f32]) -> [f32; MOST] {
    let mut parts = [1.0_f32; MOST];
    let count = rates.len().min(MOST);
    let sum: f32 = rates.iter().take(count).sum();
    // Nobody has had more than there is.
    let scale = if sum > 1.0 { 1.0 / sum } else { 1.0 };
    for _ in 0..ROUNDS {
        // The likelihood that each has work at any time.
        let mut works = [0.0_f32; MOST];
        for ((works, rate), part) in works.iter_mut().zip(rates).zip(&parts) {
            *works = (rate.max(0.0) * scale / part.max(0.01)).min(1.0);
        }
        for (me, part) in parts.iter_mut().enumerate().take(count) {
            // Likelihood that so many others have work.
            let mut others = [0.0_f32; MOST + 1];
            let [none, ..] = &mut others;
            *none = 1.0;
            for (_, likely) in works.iter().take(count).enumerate().filter(|(at, _)| *at != me) {
                let mut before = 0.0;
                for cell in &mut others {
                    let here = *cell;
                    *cell = here * (1.0 - likely) + before * likely;
                    before = here;
                }
            }
            *part = others.iter().zip(1_u8..).map(|(likely, among)| likely / f32::from(among)).sum();
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_about(rates: &[f32], wanted: &[f32]) {
        let got = own_parts(rates);
        for (got, wanted) in got.iter().zip(wanted) {
            assert!((got - wanted).abs() < 0.03, "{rates:?}: {got} instead of {wanted}");
        }
    }

    #[test]
    fn who_is_alone_has_all_of_its_time() {
        is_about(&[0.3], &[1.0]);
        is_about(&[0.9, 0.0], &[1.0]);
    }

    #[test]
    fn on_a_full_gpu_one_always_has_work() {
        // 70 % always has work; 30 % has it for 60 % of the time and then gets half.
        is_about(&[0.3, 0.7], &[0.5, 0.7]);
        is_about(&[0.5, 0.5], &[0.5, 0.5]);
    }

    #[test]
    fn the_parts_of_independent_processes_add_up() {
        // 0.44 and 0.64 of the time have work; the sum of both, less the overlap, is 0.8.
        is_about(&[0.3, 0.5], &[0.68, 0.78]);
    }

    #[test]
    fn more_than_there_is_is_taken_as_all_there_is() {
        is_about(&[3.0, 7.0], &[0.5, 0.7]);
    }
}
