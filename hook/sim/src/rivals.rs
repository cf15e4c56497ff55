//! The two controllers that others limit GPU time with, for comparison. Both count launches in grid blocks, let them go
//! while there are tokens, and set how many tokens come by the utilisation that NVML reports. Written anew from
//! descriptions of them, as our own reading; what those leave open is assumed, and says so.

/// How the tokens of a period follow from the last utilisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// A step towards the limit that grows with the distance: HAMi-core's stock controller, which is vcuda-controller's.
    Delta,
    /// Adds a little below the limit, and halves above it, or takes a third far above it: vgpu-manager's.
    Aimd,
}

/// How often utilisation is looked at.
pub(crate) const PERIOD_NS: u64 = 120_000_000;
/// How long a launch without tokens waits before it asks again.
pub(crate) const RETRY_NS: u64 = 10_000_000;
/// How often NVML takes a sample of utilisation, and how many the stock controller's second has. Percent are whole.
const SAMPLE_NS: u64 = 166_666_667;
const SECOND: usize = 6;

/// Assumed: an H100's multiprocessors and the threads of each.
const PROCESSORS: i64 = 132;
const THREADS: i64 = 2048;
/// Assumed: as many blocks are on the GPU at a time, and are there for so long.
const RESIDENT: u64 = 1056;
const BLOCK_NS: u64 = 20_000;

/// Most tokens that there can be.
const MOST: i64 = THREADS * PROCESSORS * 32;
/// Percentage points by which the distance counts at least.
const LEAST_DISTANCE: i64 = 5;

/// The limiter of one share's only process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rival {
    rule: Rule,
    limit: i64,
    tokens: i64,
    /// What comes in every period.
    income: i64,
    /// NVML's samples, the newest first: when they were taken, and GPU time until then.
    samples: [(u64, u64); SECOND + 1],
}

impl Rival {
    pub(crate) fn new(rule: Rule, percent: u8) -> Self {
        let limit = i64::from(percent);
        Self { rule, limit, tokens: 0, income: 0, samples: [(0, 0); SECOND + 1] }
    }

    /// Launches a kernel of so many nanoseconds, if there are tokens; its blocks are all that is seen of its length.
    pub(crate) fn launch(self, kernel_ns: u64) -> Option<Self> {
        let blocks = (kernel_ns * RESIDENT / BLOCK_NS).max(1);
        let tokens = self.tokens - i64::try_from(blocks).unwrap_or(i64::MAX);
        (self.tokens >= 0).then_some(Self { tokens, ..self })
    }

    /// A period is over; the process has had `used_ns` of GPU time in all.
    #[must_use]
    pub(crate) fn tick(mut self, now_ns: u64, used_ns: u64) -> Self {
        let [newest, ..] = self.samples;
        let is_new = now_ns >= newest.0 + SAMPLE_NS;
        if is_new {
            self.samples.rotate_right(1);
            let [place, ..] = &mut self.samples;
            *place = (now_ns, used_ns);
        }
        self.income = match self.rule {
            Rule::Delta => self.delta(self.percent(SECOND)),
            Rule::Aimd if is_new => self.aimd(self.percent(1)),
            Rule::Aimd => self.income,
        };
        self.tokens = (self.tokens + self.income).min(MOST);
        self
    }

    /// Utilisation over so many samples.
    fn percent(&self, samples: usize) -> i64 {
        let ([newest, ..], Some(oldest)) = (self.samples, self.samples.get(samples)) else { return 0 };
        let span = newest.0.saturating_sub(oldest.0).max(1);
        i64::try_from((newest.1 - oldest.1) * 100 / span).unwrap_or(0)
    }

    fn step(distance: i64) -> i64 {
        PROCESSORS * PROCESSORS * THREADS * distance / 2560
    }

    fn delta(&self, percent: i64) -> i64 {
        let distance = (self.limit - percent).abs().max(LEAST_DISTANCE);
        let mut step = Self::step(distance);
        if distance > self.limit / 2 {
            step = step * 2 * distance / (self.limit + 1);
        }
        let next = if percent <= self.limit { self.income + step } else { self.income - step };
        next.clamp(0, MOST)
    }

    /// How much is added, and how far above the limit is far, is assumed.
    fn aimd(&self, percent: i64) -> i64 {
        let far = self.limit + self.limit / 2;
        match percent {
            percent if percent > far => self.income / 3,
            percent if percent > self.limit => self.income / 2,
            _ => (self.income + Self::step(LEAST_DISTANCE)).min(MOST),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenarios::tenants;
    use crate::world::{Load, VARIANTS, run_rival};

    /// Percent of the GPU that one tenant of 50 % gets in each second after ten.
    fn seconds(rule: Rule) -> Vec<f64> {
        let tenants = tenants(&[50], Load::of(5_000_000));
        let outcome = run_rival(rule, VARIANTS[0], &tenants, 1_000_000_000, 30, 1);
        outcome.windows.iter().skip(10).map(|shares| shares[0] * 100.0).collect()
    }

    #[test]
    fn the_stock_controller_swings_about_its_limit() {
        let got = seconds(Rule::Delta);
        let mean = got.iter().sum::<f64>() / got.len() as f64;
        assert!((45.0..55.0).contains(&mean), "{got:?}");
        assert!(got.iter().any(|got| (got - 50.0).abs() > 1.0), "ours would be nearer: {got:?}");
    }

    #[test]
    fn halving_keeps_below_the_limit() {
        let got = seconds(Rule::Aimd);
        let mean = got.iter().sum::<f64>() / got.len() as f64;
        assert!((25.0..45.0).contains(&mean), "{got:?}");
    }

    #[test]
    fn without_tokens_nothing_goes() {
        let rival = Rival::new(Rule::Delta, 50).launch(1_000_000).unwrap();
        assert!(rival.launch(1).is_none(), "the first launch owes its blocks");
        let rival = (1..100_u64).fold(rival, |rival, tick| rival.tick(tick * PERIOD_NS, 0));
        assert!(rival.launch(1).is_some());
    }
}
