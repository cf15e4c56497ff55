//! Aligns periodic loops to the same moments, so that an idle node is woken once for all of them.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

static FIRST: OnceLock<Instant> = OnceLock::new();

/// Waits until the next common moment of all loops with this interval: a multiple of it after the first of
/// all waits.
pub(crate) async fn next(every: Duration) {
    let since = FIRST.get_or_init(Instant::now).elapsed();
    tokio::time::sleep(left(since, every)).await;
}

/// Returns the rest of the present interval, `since` after the first wait.
fn left(since: Duration, every: Duration) -> Duration {
    let over = since.as_nanos().checked_rem(every.as_nanos()).unwrap_or(0);
    every.saturating_sub(Duration::from_nanos(u64::try_from(over).unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn whoever_looks_twice_as_seldom_looks_when_others_do(since in 0u64..1 << 50, every in 1u64..1 << 40) {
            let [since, every] = [since, every].map(Duration::from_nanos);
            let (often, seldom) = (since + left(since, every), since + left(since, every * 2));
            prop_assert!(often > since && often - since <= every);
            prop_assert_eq!((seldom.as_nanos() - often.as_nanos()) % every.as_nanos(), 0);
        }
    }

    #[test]
    fn no_time_is_waited_for_as_such() {
        assert_eq!(left(Duration::from_secs(7), Duration::ZERO), Duration::ZERO);
    }
}
