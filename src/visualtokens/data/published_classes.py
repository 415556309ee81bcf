"""The classes of the public segmentation datasets: names, numbers in their masks, and colours."""

from __future__ import annotations

from collections.abc import Mapping

from visualtokens.data.segmentation import Colour

# Class names, in the order of their numbers.

PETS = ("pet", "background", "border")

LIP = (
    *("background", "hat", "hair", "glove", "sunglasses", "upper clothes", "dress", "coat", "socks", "pants"),
    *("jumpsuits", "scarf", "skirt", "face", "left arm", "right arm", "left leg", "right leg"),
    *("left shoe", "right shoe"),
)

# The 91 stuff classes, numbers 92 to 182 in COCO.
COCO_STUFF = (
    *("banner", "blanket", "branch", "bridge", "building-other", "bush", "cabinet", "cage", "cardboard"),
    *("carpet", "ceiling-other", "ceiling-tile", "cloth", "clothes", "clouds", "counter", "cupboard"),
    *("curtain", "desk-stuff", "dirt", "door-stuff", "fence", "floor-marble", "floor-other", "floor-stone"),
    *("floor-tile", "floor-wood", "flower", "fog", "food-other", "fruit", "furniture-other", "grass"),
    *("gravel", "ground-other", "hill", "house", "leaves", "light", "mat", "metal", "mirror-stuff", "moss"),
    *("mountain", "mud", "napkin", "net", "paper", "pavement", "pillow", "plant-other", "plastic"),
    *("platform", "playingfield", "railing", "railroad", "river", "road", "rock", "roof", "rug", "salad"),
    *("sand", "sea", "shelf", "sky-other", "skyscraper", "snow", "solid-other", "stairs", "stone", "straw"),
    *("structural-other", "table", "tent", "textile-other", "towel", "tree", "vegetable", "wall-brick"),
    *("wall-concrete", "wall-other", "wall-panel", "wall-stone", "wall-tile", "wall-wood", "water-other"),
    *("waterdrops", "window-blind", "window-other", "wood"),
)

ADE20K = (
    *("wall", "building", "sky", "floor", "tree", "ceiling", "road", "bed", "windowpane", "grass", "cabinet"),
    *("sidewalk", "person", "earth", "door", "table", "mountain", "plant", "curtain", "chair", "car"),
    *("water", "painting", "sofa", "shelf", "house", "sea", "mirror", "rug", "field", "armchair", "seat"),
    *("fence", "desk", "rock", "wardrobe", "lamp", "bathtub", "railing", "cushion", "base", "box", "column"),
    *("signboard", "chest of drawers", "counter", "sand", "sink", "skyscraper", "fireplace", "refrigerator"),
    *("grandstand", "path", "stairs", "runway", "case", "pool table", "pillow", "screen door", "stairway"),
    *("river", "bridge", "bookcase", "blind", "coffee table", "toilet", "flower", "book", "hill", "bench"),
    *("countertop", "stove", "palm", "kitchen island", "computer", "swivel chair", "boat", "bar"),
    *("arcade machine", "hovel", "bus", "towel", "light", "truck", "tower", "chandelier", "awning"),
    *("streetlight", "booth", "television receiver", "airplane", "dirt track", "apparel", "pole", "land"),
    *("bannister", "escalator", "ottoman", "bottle", "buffet", "poster", "stage", "van", "ship", "fountain"),
    *("conveyer belt", "canopy", "washer", "plaything", "swimming pool", "stool", "barrel", "basket"),
    *("waterfall", "tent", "bag", "minibike", "cradle", "oven", "ball", "food", "step", "tank"),
    *("trade name", "microwave", "pot", "animal", "bicycle", "lake", "dishwasher", "screen", "blanket"),
    *("sculpture", "hood", "sconce", "vase", "traffic light", "tray", "ashcan", "fan", "pier", "crt screen"),
    *("plate", "monitor", "bulletin board", "shower", "radiator", "glass", "clock", "flag"),
)

VOC = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train"),
    "tvmonitor",
)


def voc_colour(number: int) -> Colour:
    """The colour of a number in the palette of VOC: its bits, spread over the three channels."""
    red, green, blue = (
        sum((number >> 3 * bit + channel & 1) << 7 - bit for bit in range(8)) for channel in range(3)
    )
    return red, green, blue


# The 19 evaluated classes in the order of their train ids: number in the labelIds masks, and colour.
CITYSCAPES: Mapping[str, tuple[int, Colour]] = {
    "road": (7, (128, 64, 128)),
    "sidewalk": (8, (244, 35, 232)),
    "building": (11, (70, 70, 70)),
    "wall": (12, (102, 102, 156)),
    "fence": (13, (190, 153, 153)),
    "pole": (17, (153, 153, 153)),
    "traffic light": (19, (250, 170, 30)),
    "traffic sign": (20, (220, 220, 0)),
    "vegetation": (21, (107, 142, 35)),
    "terrain": (22, (152, 251, 152)),
    "sky": (23, (70, 130, 180)),
    "person": (24, (220, 20, 60)),
    "rider": (25, (255, 0, 0)),
    "car": (26, (0, 0, 142)),
    "truck": (27, (0, 0, 70)),
    "bus": (28, (0, 60, 100)),
    "train": (31, (0, 80, 100)),
    "motorcycle": (32, (0, 0, 230)),
    "bicycle": (33, (119, 11, 32)),
}

# The 11 classes of CamVid that are usually evaluated, and which of the 32 labels each consists of. The first
# one gives the class its colour.
CAMVID: Mapping[str, tuple[str, ...]] = {
    "Sky": ("Sky",),
    "Building": ("Building", "Archway", "Bridge", "Tunnel", "Wall"),
    "Pole": ("Column_Pole", "TrafficCone"),
    "Road": ("Road", "LaneMkgsDriv", "LaneMkgsNonDriv"),
    "Pavement": ("Sidewalk", "ParkingBlock", "RoadShoulder"),
    "Tree": ("Tree", "VegetationMisc"),
    "SignSymbol": ("SignSymbol", "Misc_Text", "TrafficLight"),
    "Fence": ("Fence",),
    "Car": ("Car", "OtherMoving", "SUVPickupTruck", "Train", "Truck_Bus"),
    "Pedestrian": ("Pedestrian", "Animal", "CartLuggagePram", "Child"),
    "Bicyclist": ("Bicyclist", "MotorcycleScooter"),
}

CAMVID_COLOURS: Mapping[str, Colour] = {
    "Animal": (64, 128, 64),
    "Archway": (192, 0, 128),
    "Bicyclist": (0, 128, 192),
    "Bridge": (0, 128, 64),
    "Building": (128, 0, 0),
    "Car": (64, 0, 128),
    "CartLuggagePram": (64, 0, 192),
    "Child": (192, 128, 64),
    "Column_Pole": (192, 192, 128),
    "Fence": (64, 64, 128),
    "LaneMkgsDriv": (128, 0, 192),
    "LaneMkgsNonDriv": (192, 0, 64),
    "Misc_Text": (128, 128, 64),
    "MotorcycleScooter": (192, 0, 192),
    "OtherMoving": (128, 64, 64),
    "ParkingBlock": (64, 192, 128),
    "Pedestrian": (64, 64, 0),
    "Road": (128, 64, 128),
    "RoadShoulder": (128, 128, 192),
    "Sidewalk": (0, 0, 192),
    "SignSymbol": (192, 128, 128),
    "Sky": (128, 128, 128),
    "SUVPickupTruck": (64, 128, 192),
    "TrafficCone": (0, 0, 64),
    "TrafficLight": (0, 64, 64),
    "Train": (192, 64, 128),
    "Tree": (128, 128, 0),
    "Truck_Bus": (192, 128, 192),
    "Tunnel": (64, 0, 64),
    "VegetationMisc": (192, 192, 0),
    "Void": (0, 0, 0),
    "Wall": (64, 192, 0),
}
