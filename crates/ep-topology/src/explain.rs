//! Margin plans in words.

use std::fmt::Write as _;

use crate::{Capacity, Launch, Margin, MarginPlan, SmMap, Verdict};

/// Why a launch costs the margin it costs, in a few sentences.
pub(crate) fn explain(map: &SmMap, capacity: &Capacity, plan: &MarginPlan) -> String {
    let mut text = subject(&plan.launch);
    let held = capacity.clusters;
    let sms = map.sm_count();
    let at_least = if capacity.observed || plan.launch.cluster == 1 { "" } else { "at least " };
    let cluster = plan.launch.cluster;
    match plan.verdict {
        Verdict::NoSuchCluster => {
            let _ = write!(text, " never runs: no cluster of {cluster} was seen on this device.");
            return text;
        }
        Verdict::TooLarge => {
            let _ = write!(
                text,
                " never runs: all its blocks must be resident at once, and the device holds \
                 {at_least}{held} {} at once.",
                units(cluster, held)
            );
            return text;
        }
        Verdict::AtOnce => {
            let _ = write!(text, " fits the idle device of {sms} SMs at once.");
        }
        Verdict::Waves(waves) => {
            let _ = write!(
                text,
                " runs in {waves} waves or more even on the idle device, which holds \
                 {at_least}{held} {} at once.",
                units(cluster, held)
            );
        }
    }
    if let Some(starts) = &plan.starts {
        text.push(' ');
        text.push_str(&start(&plan.launch, starts));
    }
    if let (false, Some(all)) = (plan.launch.cooperative, &plan.all_resident)
        && plan.launch.blocks > cluster
    {
        let _ = write!(text, " All blocks are resident at once with {}.", amounts(all));
    }
    text.push_str(&reason(map, capacity, plan));
    text
}

fn subject(launch: &Launch) -> String {
    let Launch { blocks, cluster, cooperative } = *launch;
    let kind = if cooperative { "A cooperative launch" } else { "A launch" };
    match cluster {
        1 => format!("{kind} of {blocks} {}", if blocks == 1 { "block" } else { "blocks" }),
        _ => format!("{kind} of {blocks} blocks in clusters of {cluster}"),
    }
}

fn units(cluster: u32, count: u32) -> String {
    let plural = if count == 1 { "" } else { "s" };
    match cluster {
        1 => format!("block{plural}"),
        _ => format!("cluster{plural} of {cluster}"),
    }
}

fn start(launch: &Launch, starts: &Margin) -> String {
    let amounts = amounts(starts);
    match (launch.cooperative, launch.cluster) {
        (true, _) => format!("It starts only when all of it fits: with {amounts}."),
        (false, 1) => format!("Its first block starts with {amounts}."),
        (false, _) => format!("Its first cluster starts with {amounts}."),
    }
}

fn amounts(margin: &Margin) -> String {
    match margin.practice {
        Some(practice) if practice == margin.worst_case => {
            format!("{} free, wherever they are", sms(practice))
        }
        Some(practice) => format!(
            "{} free as this device leaves them, {} wherever they are",
            sms(practice),
            margin.worst_case
        ),
        None => format!("{} free, wherever they are", sms(margin.worst_case)),
    }
}

fn sms(count: u32) -> String {
    format!("{count} SM{}", if count == 1 { "" } else { "s" })
}

/// Where the SMs beyond the blocks go.
fn reason(map: &SmMap, capacity: &Capacity, plan: &MarginPlan) -> String {
    let Launch { blocks, cluster, .. } = plan.launch;
    let Some(all) = &plan.all_resident else { return String::new() };
    let extra = all.worst_case.saturating_sub(blocks);
    if cluster == 1 || extra == 0 {
        return String::new();
    }
    let hosting = capacity.per_domain.iter().filter(|count| **count > 0).count();
    let lone = map.domains().len() - hosting + map.unseen() as usize;
    let mut text = format!(
        " The {extra} SMs beyond its {blocks} blocks can be wasted because a cluster cannot span \
         the device's domains: each of {hosting} domains can have up to {} free SMs that host no \
         cluster",
        cluster - 1
    );
    if lone > 0 {
        let _ = write!(text, ", and {lone} hold none of this size at all");
    }
    text.push('.');
    if capacity.unattributed > 0 {
        let _ = write!(
            text,
            " The device holds up to {} fewer clusters of this size than its domains' sizes \
             suggest; the margin allows for that.",
            capacity.unattributed
        );
    }
    text
}
