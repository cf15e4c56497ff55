//! Measures what shares use, read from the regions that the limiter keeps.

use crate::ledger::Ledger;
use crate::metrics::{Metrics, ShareLabels};
use crate::share::read_region;
use aliquot_quota::region::RegionView;
use std::path::Path;

/// Sets the metrics of all shares. A region that cannot be read is left out; the limiter itself fails closed
/// on it.
pub fn measure(metrics: &Metrics, shares: &Path, ledger: &Ledger) {
    metrics.share_quota.clear();
    metrics.share_used.clear();
    metrics.share_refused.clear();
    for record in ledger.claims.values().filter(|record| !record.is_parked()) {
        for (device, share) in record.devices.iter().filter_map(|d| Some((d, d.share.as_ref()?))) {
            let labels = ShareLabels::of(record, device);
            let gauge = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
            metrics.share_quota.get_or_create(&labels).set(gauge(share.limit().memory_bytes));
            let Ok((_, bytes)) = read_region(shares, &device.result_id) else { continue };
            if let Ok(region) = RegionView::parse(&bytes) {
                metrics.share_used.get_or_create(&labels).set(gauge(region.total_bytes()));
                metrics.share_refused.get_or_create(&labels).inc_by(region.refused());
            }
        }
    }
}
