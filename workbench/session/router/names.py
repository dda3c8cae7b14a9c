"""Names that devices are made from. The two splits share no host name, site, VLAN name or description."""

from __future__ import annotations

from workbench.session.router.state import Split

ROLES: dict[Split, tuple[str, ...]] = {
    "train": ("rtr", "sw", "core", "edge", "dist", "acc", "gw", "lab", "wan", "dc", "mdf", "r", "s"),
    "test": ("br", "leaf", "agg", "pe", "idf", "hub"),
}
SITES: dict[Split, tuple[str, ...]] = {
    "train": (
        *("ams", "fra", "lon", "par", "mad", "vie", "zrh", "osl", "hel", "rom", "lis", "ath", "bud", "prg", "waw"),
        *("dub", "lab", "hq", "north", "south", "site", "main", "old", "new"),
    ),
    "test": ("nyc", "tok", "sin", "syd", "lima", "kyiv", "riga", "east", "west", "annex"),
}
VLANS: dict[Split, tuple[str, ...]] = {
    "train": (
        *("USERS", "VOICE", "PRINTERS", "SERVERS", "GUEST", "MGMT", "CAMERAS", "IOT", "STAFF", "LAB", "BACKUP", "DMZ"),
        *("FINANCE", "HR", "TRANSIT", "WIFI", "Management", "VLan50", "Phones", "Sensors", "users_2", "native"),
    ),
    "test": ("SALES", "STORAGE", "SCANNERS", "ADMIN", "TENANTS", "BUILDING", "CLINIC", "RADIO", "POS", "Kiosk"),
}
DESCRIPTIONS: dict[Split, tuple[str, ...]] = {
    "train": (
        *("uplink to core", "link to ISP", "to distribution", "server rack 4", "access point", "backup link", "spare"),
        *("printer room", "voice gateway", "camera pole", "office 12", "lab bench", "Trunk to mdf", "AP-3", "patch 7"),
    ),
    "test": ("to data hall", "clinic floor 2", "radio mast", "tenant B", "fibre to annex", "kiosk row", "loading dock"),
}
USERS: dict[Split, tuple[str, ...]] = {
    "train": ("admin", "netops", "backup", "svc", "cisco", "maria", "jonas", "noc"),
    "test": ("oper", "field", "priya", "tomas", "deploy"),
}
PLATFORMS: tuple[tuple[str, str, str, str], ...] = (
    ("WS-C3750X-24", "C3750E", "c3750e-universalk9-mz", "switch"),
    ("WS-C2960X-48", "C2960X", "c2960x-universalk9-mz", "switch"),
    ("WS-C4948E", "cat4500e", "cat4500e-entservicesk9-mz", "switch"),
    ("WS-C3560CX-8", "C3560CX", "c3560cx-universalk9-mz", "switch"),
    ("C9300-24T", "CAT9K", "cat9k-universalk9", "switch"),
    ("CISCO2911", "C2900", "c2900-universalk9-mz", "router"),
    ("CISCO1941", "C1900", "c1900-universalk9-mz", "router"),
    ("ISR4331", "ISR", "isr4300-universalk9", "router"),
    ("ASR1002-X", "ASR1000", "asr1000rp1-adventerprisek9", "router"),
    ("CISCO3845", "3800", "c3845-advipservicesk9-mz", "router"),
)
"""Model, software family, image, kind."""
NEIGHBOURS: tuple[tuple[str, str], ...] = (
    ("WS-C3560X", "S I"),
    ("C9300-24U", "R S I"),
    ("C9500-40X", "R S I"),
    ("CISCO2911", "R B S I"),
    ("ASR1002-H", "R I"),
    ("ISR4331", "R S I"),
    ("WS-C2960", "S I"),
    ("AIR-CAP35", "T B I"),
    ("IP Phone", "H P M"),
    ("N5K-C5548", "S I s"),
    ("CISCO1941", "R B"),
    ("OE-VWAAS", "H"),
)
"""Platform and capability letters of what stands at the other end."""
PORTS: dict[str, tuple[str, ...]] = {
    "router": ("GigabitEthernet0/{}", "FastEthernet0/{}", "Ethernet0/{}", "GigabitEthernet0/0/{}"),
    "switch": (
        *("GigabitEthernet1/0/{}", "FastEthernet0/{}", "GigabitEthernet0/{}", "TenGigabitEthernet1/1/{}"),
        *("GigabitEthernet1/{}", "GigabitEthernet2/0/{}", "GigabitEthernet7/{}"),
    ),
}
MONTHS: tuple[str, ...] = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
