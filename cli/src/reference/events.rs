//! `events.md`: reasons of events, from the tables that the programs' constants are made from.

use super::markdown::{Page, code, lines, phrase};
use aliquot_model::event::Reason;

/// All of it.
pub(super) fn page() -> String {
    let about = "Events by their reason, for whoever meets one: `kubectl get events -A --field-selector reason=NAME`.\n\
                 The text of an event names the object, what goes on, and what to do; the table says it in general.\n\
                 The same words about an object are said again after five minutes at most; an event is kept as long as \
                 the API server keeps events, an hour unless it is told otherwise.\n\
                 By what a pod shows: [pending.md](../pending.md).";
    let mut page = Page::new("Events", "the tables of reasons in controller and kubelet-plugin", about);
    page.heading(2, "From aliquot-controller");
    tell(&mut page, aliquot_controller::report::reasons::REASONS);
    page.heading(2, "From aliquot-kubelet-plugin");
    page.text("Events of Nodes are in the namespace `default`, and `kubectl describe node` shows them.");
    tell(&mut page, aliquot_kubelet_plugin::reasons::REASONS);
    page.done()
}

fn tell(page: &mut Page, reasons: &[Reason]) {
    let mut sorted: Vec<&Reason> = reasons.iter().collect();
    sorted.sort_by_key(|reason| reason.name);
    let rows = sorted.into_iter().map(|reason| {
        let about: Vec<&str> = reason.about.iter().map(|about| about.kind()).collect();
        let type_ = reason.type_.as_str().to_owned();
        [code(reason.name), about.join(", "), type_, phrase(&lines(reason.when)), phrase(reason.advice)]
    });
    page.table(["reason", "on", "type", "when", "what to do"], rows.collect());
}

#[test]
fn a_reason_stands_once_in_a_table() {
    for table in [aliquot_controller::report::reasons::REASONS, aliquot_kubelet_plugin::reasons::REASONS] {
        for reason in table {
            assert_eq!(table.iter().filter(|other| other.name == reason.name).count(), 1, "{}", reason.name);
        }
    }
}
