//! The two controllers that others limit GPU time with, for comparison.
//!
//! Both count launches in grid blocks, let them go while there are tokens, and set how many tokens come by
//! the utilisation that NVML reports. They are written anew from descriptions, as this project reads them;
//! where a description leaves something open, it is assumed, and the comment says so.

/// The rule by which the tokens of a period follow from the last utilisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// A step towards the limit that grows with the distance: HAMi-core's stock controller, which is
    /// vcuda-controller's.
    Delta,
    /// An addition in proportion to the distance below seven eighths of the limit, and a cut by two thirds
    /// above: vgpu-manager's controller, as its figures were taken.
    Aimd,
}

/// A GPU and the kernels on it, as a controller sees them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Board {
    /// The number of multiprocessors.
    pub processors: i64,
    /// The number of threads that fit on each.
    pub threads: i64,
    /// Grid blocks in a millisecond of the kernels that run: all that a controller knows of their length.
    pub blocks_per_ms: u64,
}

impl Board {
    /// An RTX 4080 with the kernel that vgpu-manager measures with: 65,536 blocks of 256 threads with 16,384
    /// fused multiplications and additions each would take 11.3 ms (9,728 lanes at 2.5 GHz).
    pub const RTX_4080: Self = Self { processors: 76, threads: 1536, blocks_per_ms: 5_800 };
    /// An RTX PRO 6000 with the matrix products of HAMi-core's issue 314: 46.2 in a second of 1,024 blocks
    /// each (tiles of 128 x 128 are assumed).
    pub const RTX_PRO_6000: Self = Self { processors: 188, threads: 1536, blocks_per_ms: 47 };

    /// Returns the most tokens that there can be.
    const fn most(self) -> i64 {
        self.threads * self.processors * 32
    }
}

/// The time between two looks at utilisation, in nanoseconds.
pub(crate) const PERIOD_NS: u64 = 120_000_000;
/// The time after which a launch without tokens asks again, in nanoseconds.
pub(crate) const RETRY_NS: u64 = 10_000_000;
/// The time between two samples of utilisation by NVML, in nanoseconds. Percent are whole.
pub(crate) const SAMPLE_NS: u64 = 166_666_667;

/// The least distance that counts, in percentage points.
const LEAST_DISTANCE: i64 = 5;

/// The limiter of one share's only process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rival {
    rule: Rule,
    board: Board,
    limit: i64,
    tokens: i64,
    /// The tokens that come in every period.
    income: i64,
    /// The time of NVML's last sample, and the GPU time until then.
    sample: (u64, u64),
    /// The utilisation of the last sample, in percent.
    percent: i64,
}

impl Rival {
    pub(crate) fn new(rule: Rule, board: Board, percent: u8) -> Self {
        Self { rule, board, limit: i64::from(percent), tokens: 0, income: 0, sample: (0, 0), percent: 0 }
    }

    /// Launches a kernel of `kernel_ns` if there are tokens; its blocks are all that is seen of its length.
    pub(crate) fn launch(self, kernel_ns: u64) -> Option<Self> {
        let blocks = (kernel_ns * self.board.blocks_per_ms / 1_000_000).max(1);
        let tokens = self.tokens - i64::try_from(blocks).unwrap_or(i64::MAX);
        (self.tokens >= 0).then_some(Self { tokens, ..self })
    }

    /// Ends a period; the process has had `used_ns` of GPU time in all.
    #[must_use]
    pub(crate) fn tick(mut self, now_ns: u64, used_ns: u64) -> Self {
        let (then, used_then) = self.sample;
        if now_ns >= then + SAMPLE_NS {
            self.percent = i64::try_from((used_ns - used_then) * 100 / (now_ns - then)).unwrap_or(0);
            self.sample = (now_ns, used_ns);
        }
        let income = match self.rule {
            Rule::Delta => self.delta(),
            Rule::Aimd => self.aimd(),
        };
        self.income = income.clamp(0, self.board.most());
        self.tokens = (self.tokens + self.income).min(self.board.most());
        self
    }

    fn delta(&self) -> i64 {
        let Board { processors, threads, .. } = self.board;
        let distance = (self.limit - self.percent).abs().max(LEAST_DISTANCE);
        let mut step = processors * processors * threads * distance / 2560;
        if distance > self.limit / 2 {
            step = step * 2 * distance / (self.limit + 1);
        }
        if self.percent <= self.limit { self.income + step } else { self.income - step }
    }

    fn aimd(&self) -> i64 {
        let near = self.limit * 875 / 1000;
        let step = self.board.processors * self.board.threads * near / 400;
        if self.percent <= near {
            let distance = (self.limit - self.percent).max(LEAST_DISTANCE);
            self.income + step * distance / LEAST_DISTANCE
        } else {
            (self.income / 3).max(step)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_tokens_nothing_goes() {
        for rule in [Rule::Delta, Rule::Aimd] {
            let rival = Rival::new(rule, Board::RTX_4080, 50).launch(1_000_000).unwrap();
            assert!(rival.launch(1).is_none(), "the first launch owes its blocks");
            let rival = (1..100_u64).fold(rival, |rival, tick| rival.tick(tick * PERIOD_NS, 0));
            assert!(rival.launch(1).is_some());
        }
    }

    #[test]
    fn far_above_its_limit_the_income_of_both_sinks() {
        for rule in [Rule::Delta, Rule::Aimd] {
            let rival = Rival::new(rule, Board::RTX_4080, 30).tick(PERIOD_NS, 0);
            let busy = rival.tick(2 * PERIOD_NS, 2 * PERIOD_NS).tick(3 * PERIOD_NS, 3 * PERIOD_NS);
            assert!(busy.income < rival.income, "{rule:?}: {} after {}", busy.income, rival.income);
        }
    }
}
