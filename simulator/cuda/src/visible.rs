//! Which devices a process sees, and in which order.

/// One GPU whose device node the process can open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// GPU index on the node.
    pub(crate) gpu: usize,
    /// `GPU-…`.
    pub(crate) uuid: String,
    /// `None` with MIG off, else the MIG devices whose capability nodes the process can open: UUID, GPU instance,
    /// compute instance.
    pub(crate) instances: Option<Vec<(String, u32, u32)>>,
    /// For the driver's default order; larger is faster.
    pub(crate) speed: u64,
}

/// A device that the driver enumerates: a GPU, or one of its MIG devices by position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) gpu: usize,
    pub(crate) instance: Option<usize>,
}

/// Applies `CUDA_DEVICE_ORDER` and `CUDA_VISIBLE_DEVICES` as the driver documents them.
///
/// A list is read up to its first entry that names nothing; an entry that repeats another makes the list empty. Of
/// all MIG devices only one is ever enumerated, and then no whole GPU beside it.
pub(crate) fn choose(mut candidates: Vec<Candidate>, visible: Option<&str>, by_bus_id: bool) -> Vec<Choice> {
    if !by_bus_id {
        candidates.sort_by_key(|c| std::cmp::Reverse(c.speed));
    }
    let usable = |c: &Candidate| c.instances.as_ref().is_none_or(|i| !i.is_empty());
    let first = |c: &Candidate| Choice { gpu: c.gpu, instance: c.instances.as_ref().map(|_| 0) };
    let chosen: Vec<Choice> = match visible {
        None => candidates.iter().filter(|c| usable(c)).map(first).collect(),
        Some(list) => {
            let mut chosen = Vec::new();
            for entry in list.split(',').map(str::trim) {
                let Some(choice) = named(&candidates, entry) else { break };
                if chosen.contains(&choice) {
                    return Vec::new();
                }
                chosen.push(choice);
            }
            chosen
        }
    };
    match chosen.iter().find(|c| c.instance.is_some()) {
        Some(mig) => vec![*mig],
        None => chosen,
    }
}

fn named(candidates: &[Candidate], entry: &str) -> Option<Choice> {
    let whole = |c: &Candidate| match &c.instances {
        None => Some(Choice { gpu: c.gpu, instance: None }),
        Some(list) if !list.is_empty() => Some(Choice { gpu: c.gpu, instance: Some(0) }),
        Some(_) => None,
    };
    if let Some(old) = entry.strip_prefix("MIG-GPU-") {
        // The form of drivers before 470: MIG-GPU-<uuid>/<GPU instance>/<compute instance>.
        let mut parts = old.split('/');
        let uuid = format!("GPU-{}", parts.next()?);
        let (gi, ci) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        let candidate = candidates.iter().find(|c| c.uuid == uuid)?;
        let instance = candidate.instances.as_ref()?.iter().position(|i| (i.1, i.2) == (gi, ci))?;
        return Some(Choice { gpu: candidate.gpu, instance: Some(instance) });
    }
    if entry.starts_with("MIG-") {
        let found = |c: &Candidate| {
            let instance = c.instances.as_ref()?.iter().position(|i| i.0.starts_with(entry))?;
            Some(Choice { gpu: c.gpu, instance: Some(instance) })
        };
        return only(candidates.iter().filter_map(found));
    }
    if entry.starts_with("GPU-") {
        return only(candidates.iter().filter(|c| c.uuid.starts_with(entry))).and_then(whole);
    }
    entry.parse::<usize>().ok().and_then(|i| candidates.get(i)).and_then(whole)
}

/// The only item, as an abbreviation must not be ambiguous.
fn only<T>(mut items: impl Iterator<Item = T>) -> Option<T> {
    let first = items.next()?;
    items.next().is_none().then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(index: usize, speed: u64) -> Candidate {
        Candidate { gpu: index, uuid: format!("GPU-{index}{index}"), instances: None, speed }
    }

    fn mig(index: usize, instances: &[&str]) -> Candidate {
        let list = instances.iter().zip(1..).map(|(u, gi)| ((*u).to_owned(), gi, 0)).collect();
        Candidate { instances: Some(list), ..gpu(index, 0) }
    }

    fn gpus(chosen: &[Choice]) -> Vec<usize> {
        chosen.iter().map(|c| c.gpu).collect()
    }

    #[test]
    fn without_a_list_all_are_seen_fastest_first_or_by_bus() {
        let all = vec![gpu(0, 1), gpu(1, 3), gpu(2, 3)];
        assert_eq!(gpus(&choose(all.clone(), None, false)), [1, 2, 0]);
        assert_eq!(gpus(&choose(all, None, true)), [0, 1, 2]);
    }

    #[test]
    fn a_list_orders_and_ends_at_the_first_bad_entry() {
        let all = vec![gpu(0, 0), gpu(1, 0), gpu(2, 0)];
        let see = |list| gpus(&choose(all.clone(), Some(list), true));
        assert_eq!(see("2, 0"), [2, 0]);
        assert_eq!(see("1,-1,0"), [1]);
        assert_eq!(see("GPU-22,GPU-1"), [2, 1]);
        assert_eq!(see("GPU-"), Vec::<usize>::new(), "ambiguous");
        assert_eq!(see(""), Vec::<usize>::new());
        assert_eq!(see("0,1,0"), Vec::<usize>::new(), "repeated");
        assert_eq!(see("3"), Vec::<usize>::new());
    }

    #[test]
    fn one_mig_device_at_most_and_then_no_whole_gpu() {
        let all = vec![gpu(0, 0), mig(1, &["MIG-a", "MIG-b"])];
        assert_eq!(choose(all.clone(), None, true), [Choice { gpu: 1, instance: Some(0) }]);
        assert_eq!(choose(all.clone(), Some("MIG-b,MIG-a"), true), [Choice { gpu: 1, instance: Some(1) }]);
        assert_eq!(choose(all.clone(), Some("MIG-GPU-11/2/0"), true), [Choice { gpu: 1, instance: Some(1) }]);
        assert_eq!(gpus(&choose(all, Some("0"), true)), [0]);
        assert_eq!(choose(vec![mig(0, &[])], None, true), []);
    }
}
