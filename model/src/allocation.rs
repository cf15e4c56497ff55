//! The mark of an allocation, by which controller and node agents recognise an allocation of the controller.
//!
//! The controller writes the mark into the claim's annotation [`crate::names::ALLOCATION`] together with the
//! allocation. The mark depends on the claim's UID. So a mark that was copied from another claim, or written
//! before the API server gave the claim its UID, matches no allocation of this claim.

use uuid::Uuid;

/// The part of an allocation result that is in the mark (`DeviceRequestAllocationResult`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MarkedResult<'a> {
    /// Name of the request, with its subrequest.
    pub request: &'a str,
    /// Name of the driver.
    pub driver: &'a str,
    /// Name of the pool.
    pub pool: &'a str,
    /// Name of the device.
    pub device: &'a str,
    /// ID of the share, if the device is shared.
    pub share_id: Option<&'a str>,
}

/// Returns the mark of an allocation: its time in seconds since 1970 in clear, a dot, and a name that
/// depends on the claim's UID, the time and every result in its order. The time is in clear because a server
/// without `allocationTimestamp` (Kubernetes 1.34 with its default gates) drops it from the status, and the
/// annotation is then the only place that still knows it.
pub fn mark<'a>(
    claim_uid: &str,
    seconds: i64,
    results: impl IntoIterator<Item = MarkedResult<'a>>,
) -> String {
    let mut text = format!("{claim_uid} {seconds}");
    for MarkedResult { request, driver, pool, device, share_id } in results {
        text.push_str(&format!(" {request} {driver} {pool} {device} {}", share_id.unwrap_or("-")));
    }
    format!("{seconds}.{}", Uuid::new_v5(&Uuid::NAMESPACE_OID, text.as_bytes()))
}

/// Returns the time that a mark states, in seconds since 1970; `None` if the text states none. Compare the
/// text with [`mark`] before relying on the time.
pub fn stated_seconds(mark: &str) -> Option<i64> {
    mark.split_once('.')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESULT: MarkedResult<'_> =
        MarkedResult { request: "gpu", driver: "d", pool: "d/n1", device: "gpu-0", share_id: None };

    #[test]
    fn a_mark_changes_with_the_claim_the_time_and_every_part_of_a_result() {
        let marks = [
            mark("uid", 100, [RESULT]),
            mark("other", 100, [RESULT]),
            mark("uid", 101, [RESULT]),
            mark("uid", 100, [MarkedResult { request: "b", ..RESULT }]),
            mark("uid", 100, [MarkedResult { driver: "e", ..RESULT }]),
            mark("uid", 100, [MarkedResult { pool: "d/n2", ..RESULT }]),
            mark("uid", 100, [MarkedResult { device: "gpu-1", ..RESULT }]),
            mark("uid", 100, [MarkedResult { share_id: Some("s"), ..RESULT }]),
            mark("uid", 100, [RESULT, RESULT]),
            mark("uid", 100, []),
        ];
        for (at, one) in marks.iter().enumerate() {
            assert!(marks.iter().skip(at + 1).all(|other| other != one), "{one} twice");
        }
        assert_eq!(mark("uid", 100, [RESULT]), mark("uid", 100, [RESULT]));
    }

    #[test]
    fn a_mark_states_its_time() {
        assert_eq!(stated_seconds(&mark("uid", 100, [RESULT])), Some(100));
        for nonsense in ["", "x.y", "100", ".5"] {
            assert_eq!(stated_seconds(nonsense), None, "{nonsense}");
        }
    }
}
